"""Time series: tables at their own times, models of them, and what they forecast.

    tables -> Panel -> SeriesModel

`Forecaster` and `Classifier` do all of it for a frame (glissando.series.estimators). `SeriesModel` is the model
(glissando.series.model), `Panel` the series that it is trained on (glissando.series.panel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glissando.lazy import attributes

_HOMES = {
    "Classifier": "estimators",
    "Forecaster": "estimators",
    "Panel": "panel",
    "SeriesConfig": "model",
    "SeriesData": "options",
    "SeriesModel": "model",
    "read_panel": "reading",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from glissando.series.estimators import Classifier as Classifier
    from glissando.series.estimators import Forecaster as Forecaster
    from glissando.series.model import SeriesConfig as SeriesConfig
    from glissando.series.model import SeriesModel as SeriesModel
    from glissando.series.options import SeriesData as SeriesData
    from glissando.series.panel import Panel as Panel
    from glissando.series.reading import read_panel as read_panel

__getattr__, __dir__ = attributes(__name__, _HOMES, __all__)
