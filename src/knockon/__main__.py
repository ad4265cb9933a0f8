"""``python -m knockon``: the ``knockon`` command where its script is not on the path."""

from knockon.cli.app import main

if __name__ == "__main__":
    main()
