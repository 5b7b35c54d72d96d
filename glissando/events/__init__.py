"""Events at their own times: logs, models of them, and when the next event comes and of which kind it is.

    tables -> EventLog -> EventModel

`EventModel` is the model (glissando.events.model), `EventLog` the series that it is trained on (glissando.events.log),
`EventRun` a trained model and how it reads tables (glissando.events.task).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glissando.lazy import attributes

_HOMES = {
    "EventConfig": "model",
    "EventEncoding": "log",
    "EventForecaster": "estimators",
    "EventLog": "log",
    "EventModel": "model",
    "EventRun": "task",
    "EventsData": "options",
    "read_events": "reading",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from glissando.events.estimators import EventForecaster as EventForecaster
    from glissando.events.log import EventEncoding as EventEncoding
    from glissando.events.log import EventLog as EventLog
    from glissando.events.model import EventConfig as EventConfig
    from glissando.events.model import EventModel as EventModel
    from glissando.events.options import EventsData as EventsData
    from glissando.events.reading import read_events as read_events
    from glissando.events.task import EventRun as EventRun

__getattr__, __dir__ = attributes(__name__, _HOMES, __all__)
