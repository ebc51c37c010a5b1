"""Classes of ``config.data``, by the names that configs use."""

from caatnet.data.graphs.data import GraphData
from caatnet.data.images import ImageData
from caatnet.data.text import TextData

# The fields of a class are the keys of its section.
DATA = {"text": TextData, "images": ImageData, "graphs": GraphData}
