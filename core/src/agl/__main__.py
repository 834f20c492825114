"""``python -m agl``: the same as the command ``agl``."""

from agl.cli import main

if __name__ == "__main__":
    main()
