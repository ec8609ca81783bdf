"""`python -m gblr` is the command `gblr`."""

from gblr.cli import main

if __name__ == "__main__":
    main()
