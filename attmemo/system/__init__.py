"""The machine and its files: cores, memory, locks, sizes, JSON fields."""
