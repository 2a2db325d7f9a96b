"""The command line. `main.py` finds the verbs; every other module of this folder is one verb."""
