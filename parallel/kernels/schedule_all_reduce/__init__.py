"""All-reduce kernel that executes the table of a schedule."""
