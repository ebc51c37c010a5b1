"""Named codec cases, shared by tests and benchmarks."""

from typing import NamedTuple

from parallel.kernels.codec.reference import Codec


class CodecCase(NamedTuple):
  """Sizes and options of one call of the kernel.

  Attributes:
    shape: Shape of the array that is encoded.
    codec: The codec.
    senders: Number of encoded arrays that are averaged, M.
    dtype: Dtype of parameters and anchor.
  """

  shape: tuple[int, ...]
  codec: Codec
  senders: int = 2
  dtype: str = "float32"


CASES = {
  "int8, block 128": CodecCase((3, 640), Codec("int8", 128), 9),
  "int4, odd, 300 rows": CodecCase((3, 100, 700), Codec("int4"), 3),
  "e3m0": CodecCase((157 * 256,), Codec("e3m0"), 4),
  "e3m0, odd, bf16": CodecCase((777,), Codec("e3m0"), 1, "bfloat16"),
  "int8, stochastic, 300 rows": CodecCase((300, 512), Codec("int8", 256, True)),
  "int4, odd, stochastic": CodecCase((3, 400), Codec("int4", 256, True)),
  "e3m0, odd, stochastic": CodecCase((1500,), Codec("e3m0", 512, True)),
}

# One weight matrix of a 1B model, the same number of elements as a vector, and
# a larger matrix.
LARGE = {
  name: CodecCase((2048, 2048), codec)
  for name, codec in {
    "int8": Codec("int8"),
    "int4": Codec("int4"),
    "e3m0": Codec("e3m0"),
    "e3m0, stochastic": Codec("e3m0", 256, True),
  }.items()
} | {
  "int8, vector": CodecCase((2048 * 2048,), Codec("int8")),
  "8192 x 8192": CodecCase((8192, 8192), Codec("int8"), 2, "bfloat16"),
}
