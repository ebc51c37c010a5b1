"""Programs of other projects, and what they send."""
