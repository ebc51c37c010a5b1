"""``config.data``: what may be trained on, by the names that configs use."""

from caatnet.data.images import ImageData
from caatnet.data.text import TextData

# A class's fields are the section's keys.
DATA = {"text": TextData, "images": ImageData}
