"""The tables of the pages, which `python docs/generate.py` writes."""
