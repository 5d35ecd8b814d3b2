"""Function forms of what is part of a host or a schedule rather than one plug-in."""

from __future__ import annotations

from .system_old_logits import FORMS as OLD_LOGITS_FORMS
from .system_runs import FORMS as RUN_FORMS

FORMS = {**OLD_LOGITS_FORMS, **RUN_FORMS}
