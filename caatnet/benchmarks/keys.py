"""Documentation of keys that several benchmarks share."""

ROUNDS_DOC = "Repetitions of each measurement; the median is reported."
PROMPT_DOC = "Tokens of a prompt."
TOKENS_DOC = "Tokens generated after a prompt."
RESULTS_DOC = 'JSON file of the rows; "" for none.'
