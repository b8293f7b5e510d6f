from __future__ import annotations

from hypothesis import settings

# Time limits on examples would fail on a busy machine.
settings.register_profile("layerzero", deadline=None)
settings.load_profile("layerzero")
