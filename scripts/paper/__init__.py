"""Every figure and table of the papers, measured again: one module a figure, one JSON a figure, one page of all."""
