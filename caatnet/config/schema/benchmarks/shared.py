"""Documentation that several benchmarks share."""

ROUNDS = "Repetitions of each measurement; the median counts."


PROMPT = "Tokens of a prompt."


TOKENS = "Tokens drawn after a prompt."


LIMIT = "Seconds after which no other measurement is begun."


RESULTS = 'JSON file of the rows; "" for none.'
