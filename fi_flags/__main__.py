"""`python -m fi_flags`, the same as the command `fi-flags`."""

from fi_flags.cli import main

if __name__ == "__main__":
    main("python -m fi_flags")
