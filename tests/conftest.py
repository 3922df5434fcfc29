"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing on a machine that does other work as well.
settings.register_profile("slackring", deadline=None)
settings.load_profile("slackring")
