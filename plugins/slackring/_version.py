"""The version, in the one place that the build, the command line and ``slackring.__version__`` read."""

__version__ = "0.1.0"
