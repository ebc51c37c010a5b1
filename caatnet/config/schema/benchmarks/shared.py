"""Documentation of keys that several benchmarks share."""

ROUNDS = "Repetitions of each measurement; the median is reported."


PROMPT = "Tokens of a prompt."


TOKENS = "Tokens generated after a prompt."


LIMIT = "Seconds after which no further measurement is started."


RESULTS = 'JSON file of the rows; "" for none.'
