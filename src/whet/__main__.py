"""Entry point of `python -m whet`, the same as the `whet` command."""

from whet.cli.app import main

if __name__ == "__main__":
    main()
