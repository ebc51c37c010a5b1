"""Tables, pictures and files of results."""
