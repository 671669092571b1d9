"""Tables of result pages, made from the JSON files in docs/."""
