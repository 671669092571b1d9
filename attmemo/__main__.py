"""`python -m attmemo`: the command `attmemo`, where its script is not in the path."""

from attmemo.cli import main

if __name__ == "__main__":
    main()
