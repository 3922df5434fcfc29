"""``python -m slackring`` is the command ``slackring``."""

from slackring.cli import main

if __name__ == "__main__":
    main()
