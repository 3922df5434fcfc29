"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# Tests start hundreds of Python processes, each of which would compile torch anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes says nothing on a machine that does other work as well.
settings.register_profile("slackring", deadline=None)
settings.load_profile("slackring")
