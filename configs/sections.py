"""The sections that configs are made of: every key, with its default.

A section holds the keys that do something and no others. Where there is a
choice (of model, data, optimizer or outer loop), each choice has a section of
its own; other configs change a few values.
"""

import ml_collections

ConfigDict = ml_collections.ConfigDict


def transformer() -> ConfigDict:
  """A Llama-style transformer; the sizes are those of ``tiny``."""
  model = ConfigDict()
  model.name = "transformer"
  model.vocab_size = 256
  model.width = 128
  model.num_layers = 4
  model.num_heads = 8
  model.num_kv_heads = 8
  model.ffn_width = 352
  model.rope_base = 10_000.0
  model.norm_eps = 1e-5
  model.tied_embeddings = False
  model.init_std = 0.02
  # dtype of activations; parameters are float32.
  model.dtype = "float32"
  # What the backward pass recomputes: "none", "full" (all of a layer), or
  # "reduced": all but the activations that were reduced over ranks.
  model.remat = "none"
  # Layers per iteration of the scan.
  model.unroll = 1
  # "auto", "xla", "cudnn" (GPU) or "splash" (TPU).
  model.attention = "auto"
  return model


def convolutional() -> ConfigDict:
  """A residual convolutional network with GroupNorm."""
  model = ConfigDict()
  model.name = "convolutional"
  # Channels of each stage; a stage after the first halves height and width.
  model.widths = (16, 32)
  # Residual blocks of each stage, two 3 x 3 convolutions each.
  model.blocks = 2
  # Groups of channels that are normalised together.
  model.groups = 4
  # dtype of activations; parameters are float32.
  model.dtype = "float32"
  return model


def sync() -> ConfigDict:
  """What tensor ranks synchronise in a transformer's row doors, and how."""
  sync = ConfigDict()
  # Fraction of the stream's channels that the tensor ranks share.
  sync.p = 1.0
  # Per door, in place of p: one number, or one per layer; empty means p.
  sync.p_attention = ()
  sync.p_mlp = ()
  # Private channels times sqrt(ranks): "forward", "init" or "none".
  sync.private_scale = "forward"
  # dtype of each reduction on the wire; "" means the activations'.
  sync.forward_dtype = ""
  sync.backward_dtype = "float32"
  # Whether the shared columns of a row-parallel product come first, and the
  # private ones under their reduction: "on", "off", or "auto": on GPUs.
  sync.overlap = "auto"
  # How doors all-reduce: "psum", "scatter_gather" (reduce-scatter and
  # all-gather), "ring" (of permutes), "one_shot" (all-gather, then a local
  # sum), "ring_kernel" (TPU), or "schedule:NAME" on the topology below.
  # "one_shot" and "ring_kernel" reduce, add and normalise in one kernel where
  # config.kernels has one.
  sync.route = "psum"
  # How a schedule's devices are joined: "ring", "torus", "mesh" (the last two
  # as square as can be), "bigraph", "switch" or "fully_connected"; "" means
  # "torus".
  sync.topology = ""
  # Whether the two routes with a kernel leave the MLP's update to the next
  # layer's norm: "on", "off", or "auto": where it costs no memory (LOG.md).
  sync.carry = "auto"
  return sync


def parallel() -> ConfigDict:
  """Logical sizes; --mesh says how many devices carry them."""
  parallel = ConfigDict()
  parallel.worker = 1
  parallel.data = 1
  parallel.tensor = 8
  return parallel


def outer(algorithm: str) -> ConfigDict:
  """What workers tell each other, and when: the section of one algorithm.

  Args:
    algorithm: A key of ``OUTER``.
  """
  section = ConfigDict()
  section.algorithm = algorithm
  section.update(OUTER[algorithm]())
  return section


def _exchange() -> ConfigDict:
  """How a mean over workers goes over the wire."""
  section = ConfigDict()
  # "float32", "bfloat16", or blocks of "int8", "fp8", "int4", "e3m0" with one
  # float32 scale each.
  section.codec = "float32"
  # Elements of a coded block; 0 means 256.
  section.block = 0
  # How coded blocks go: "all_gather" (rounded once) or "all_to_all" (twice).
  section.route = "all_gather"
  section.stochastic_rounding = False
  # Whether what rounding took from a worker is added to its next exchange.
  section.error_feedback = False
  return section


def _round() -> ConfigDict:
  """Inner steps between exchanges (H)."""
  return ConfigDict({"every": 30})


def _outer_step() -> ConfigDict:
  """The outer optimizer: "nesterov", "sgd" (momentum 0) or "adam"."""
  return ConfigDict(
    {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
  )


def _joined(*parts: ConfigDict) -> ConfigDict:
  section = ConfigDict()
  for part in parts:
    section.update(part)
  return section


def _fedavg() -> ConfigDict:
  section = _joined(_round(), _exchange())
  # One weight per worker, () for equal ones; workers heard per round, 0: all.
  section.weights = ()
  section.clients = 0
  return section


def _diloco() -> ConfigDict:
  return _joined(_round(), _outer_step(), _exchange())


def _streaming() -> ConfigDict:
  section = _diloco()
  # Layers per fragment (0: all is one fragment), and which of them: "strided"
  # or "sequential".
  section.fragment_layers = 1
  section.pattern = "strided"
  # Steps that an exchange takes (tau): one number, or one per worker.
  section.overlap = (0,)
  # Share of its own parameters that a worker keeps (alpha).
  section.keep = 0.0
  # Over how many of the tau steps an exchange is spread.
  section.pieces = 1
  return section


def _dc_s3gd() -> ConfigDict:
  section = _exchange()
  # Strength of the delay compensation (lambda_0).
  section.compensation = 0.2
  return section


def _sparseloco() -> ConfigDict:
  section = _round()
  section.learning_rate = 0.7
  # Kept elements per chunk; what error feedback keeps per round.
  section.chunk = 4096
  section.top_k = 64
  section.error_decay = 0.95
  return section


def _noloco() -> ConfigDict:
  section = _round()
  # Published (arXiv 2506.10911, section 4, and its authors' code): 0.7, 0.5
  # and 0.7. A momentum of 0.9 with a pull of 0.5 drives 6 workers apart.
  section.learning_rate = 0.7
  section.momentum = 0.5
  # Pull of the partner's parameters.
  section.pull = 0.7
  return section


# Algorithm -> its keys.
OUTER = {
  "data_parallel": ConfigDict,
  "local_sgd": lambda: _joined(_round(), _exchange()),
  "fedavg": _fedavg,
  "diloco": _diloco,
  "streaming": _streaming,
  "eager": _diloco,
  "dc_s3gd": _dc_s3gd,
  "sparseloco": _sparseloco,
  "noloco": _noloco,
}


def zero() -> ConfigDict:
  """Where data-parallel ranks have which part of the training state."""
  zero = ConfigDict()
  # Levels of the data-parallel ranks, outermost first, as in "node:2,gpu:4";
  # "": one level named data.
  zero.levels = ""
  # "ddp", "zero1", "zero2", "zero3" (FSDP), "hsdp", "mics", "hpz", "zeropp",
  # "frontier3" or "frontier3_quantised".
  zero.scheme = "ddp"
  # Up to which level, counted from the innermost, each is sharded, or "none";
  # secondary is the second copy of the weights, from which backwards gather.
  # "": as the scheme has it.
  zero.weights = ""
  zero.gradients = ""
  zero.optimizer = ""
  zero.secondary = ""
  # On the wire: "none", "int8" or "int4"; "": as the scheme has it.
  zero.weight_codec = ""
  zero.gradient_codec = ""
  zero.secondary_codec = ""
  # Elements of a coded block; 0 means 256.
  zero.block = 0
  # The optimizer's state waits in the host's memory (pinned) between updates.
  zero.offload = False
  # Weights of the next layer are gathered beside a layer; two are whole then.
  zero.prefetch = False
  return zero


def text() -> ConfigDict:
  """Text as bytes, for language models."""
  data = ConfigDict()
  data.name = "text"
  # A .txt or .jsonl file or a folder of them; "": Python's standard library.
  data.path = ""
  data.seq_len = 256
  data.batch_size = 16
  data.validation_percent = 5.0
  # Windows of seq_len that every evaluation reads; 0: all.
  data.validation_windows = 256
  return data


def images() -> ConfigDict:
  """Labelled images, for classifiers."""
  data = ConfigDict()
  data.name = "images"
  # An .npz file with arrays "images" and "labels"; "": scikit-learn's digits.
  data.path = ""
  # Height, width, channels.
  data.shape = (8, 8, 1)
  data.num_classes = 10
  data.batch_size = 64
  data.validation_percent = 20.0
  return data


def adamw() -> ConfigDict:
  """AdamW of each worker, warm-up and cosine decay."""
  optimizer = ConfigDict()
  optimizer.name = "adamw"
  optimizer.learning_rate = 3e-3
  optimizer.warmup_steps = 20
  # The learning rate of the last step, as a fraction of the highest.
  optimizer.final_fraction = 0.1
  optimizer.beta_1 = 0.9
  optimizer.beta_2 = 0.95
  optimizer.eps = 1e-8
  optimizer.weight_decay = 0.1
  # Largest gradient norm of a worker; 0 does not clip.
  optimizer.clip_norm = 1.0
  return optimizer


def sgd() -> ConfigDict:
  """SGD with momentum of each worker, warm-up and cosine decay."""
  optimizer = ConfigDict()
  optimizer.name = "sgd"
  optimizer.learning_rate = 0.3
  optimizer.warmup_steps = 20
  # The learning rate of the last step, as a fraction of the highest.
  optimizer.final_fraction = 0.1
  optimizer.momentum = 0.9
  optimizer.weight_decay = 0.0
  # Largest gradient norm of a worker; 0 does not clip.
  optimizer.clip_norm = 1.0
  return optimizer


def train() -> ConfigDict:
  """How long, and how often what, in steps."""
  train = ConfigDict()
  train.num_steps = 200
  # Microbatches per step.
  train.accumulation = 1
  train.log_every = 1
  train.eval_every = 100
  train.checkpoint_every = 100
  train.keep_checkpoints = 2
  return train


def choices() -> ConfigDict:
  """Every section that one config may put in another's place, for sweeps."""
  return ConfigDict({
    "outer": {name: outer(name) for name in OUTER},
    "optimizer": {"adamw": adamw(), "sgd": sgd()},
  })
