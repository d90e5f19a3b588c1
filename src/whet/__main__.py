"""`python -m whet`: the command line without its script."""

from whet.cli.app import main

if __name__ == "__main__":
    main()
