"""Analysis of one collective schedule, round by round."""
