"""Documentation of keys that several benchmarks share."""

ROUNDS = "Repetitions of each measurement; the median is reported."
PROMPT = "Tokens of a prompt."
TOKENS = "Tokens generated after a prompt."
RESULTS = 'JSON file of the rows; "" for none.'
