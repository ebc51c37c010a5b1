"""Every key that a run has, with its default; other configs change a few.

The hyper-parameters are those of the CAAT-Net study (arXiv 2506.19645 and its
official code): AdamW (0.9, 0.95), weight decay 0.1, clipping at 1, warm-up and
cosine to a tenth.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """A complete configuration; the sizes are those of ``tiny``."""
  config = ml_collections.ConfigDict()
  config.name = "base"
  config.seed = 0
  config.model = _model()
  config.parallel = _parallel()
  config.outer = _outer()
  config.zero = _zero()
  config.data = _data()
  config.optimizer = _optimizer()
  config.train = _train()
  return config


def _model() -> ml_collections.ConfigDict:
  """Sizes, synchronisation, and how it is computed."""
  model = ml_collections.ConfigDict()
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
  # Fraction of the stream's channels that the tensor ranks share.
  model.p = 1.0
  # Per door, in place of p: one number, or one per layer; empty means p.
  model.p_attention = ()
  model.p_mlp = ()
  # Private channels times sqrt(ranks): "forward", "init" or "none".
  model.private_scale = "forward"
  # dtype of activations, and of each reduction ("" = the activations').
  model.dtype = "float32"
  model.forward_dtype = ""
  model.backward_dtype = "float32"
  # "none", "full", or "reduced": keep the reduced activations only.
  model.remat = "none"
  # Layers per iteration of the scan.
  model.unroll = 1
  # Whether the shared columns of a row-parallel product come first, and the
  # private ones under their reduction: "on", "off", or "auto": on GPUs.
  model.overlap = "auto"
  # How the doors reduce: "psum", "scatter_gather", "ring" (of permutes),
  # "one_shot" (gathered, then added; with kernels, attention's in one with add
  # and norm), "ring_kernel" (TPU: attention's in one with add and norm; psum
  # elsewhere), or "schedule:NAME", made for the tensor axis's devices as joined
  # in a "ring", "torus", "mesh" (the last two as square as can be), "bigraph",
  # "switch" or "fully_connected".
  model.route = "psum"
  model.topology = "torus"
  # "auto", "xla", "cudnn" (GPU) or "splash" (TPU).
  model.attention = "auto"
  # Of norms and codecs: "auto" (Pallas on TPUs and GPUs where it takes the
  # sizes), "reference" (jnp), or "interpret": the TPU's on any machine, slowly.
  model.kernels = "auto"
  return model


def _parallel() -> ml_collections.ConfigDict:
  """Logical sizes; --mesh says how many devices carry them."""
  parallel = ml_collections.ConfigDict()
  parallel.worker = 1
  parallel.data = 1
  parallel.tensor = 8
  return parallel


def _outer() -> ml_collections.ConfigDict:
  """What workers tell each other, and when."""
  outer = ml_collections.ConfigDict()
  # "data_parallel", "local_sgd", "fedavg", "diloco", "streaming", "eager",
  # "dc_s3gd", "sparseloco" or "noloco".
  outer.algorithm = "data_parallel"
  # Inner steps per round (H).
  outer.every = 30
  # Of outer gradients: "nesterov", "sgd" or "adam".
  outer.optimizer = "nesterov"
  outer.learning_rate = 0.7
  outer.momentum = 0.9
  # On the wire: "float32", "bfloat16", or blocks of "int8", "fp8", "int4",
  # "e3m0" that one float32 scale each goes with.
  outer.codec = "float32"
  outer.block = 256
  # Of coded blocks: "all_gather" (rounded once) or "all_to_all" (twice).
  outer.route = "all_gather"
  outer.stochastic_rounding = False
  outer.error_feedback = False
  # fedavg: one weight per worker, () for equal ones; workers heard per round,
  # 0 for all.
  outer.weights = ()
  outer.clients = 0
  # streaming: layers per fragment (0: all is one fragment), and how they are
  # chosen ("strided", "sequential"); steps that an exchange takes (tau), one
  # number or one per worker; the share of a worker's own parameters that it
  # keeps (alpha); over how many of the tau steps an exchange is spread.
  outer.fragment_layers = 1
  outer.pattern = "strided"
  outer.overlap = (0,)
  outer.keep = 0.0
  outer.pieces = 1
  # dc_s3gd: strength of the delay compensation.
  outer.compensation = 0.2
  # sparseloco: kept elements per chunk; what error feedback keeps per round.
  outer.chunk = 4096
  outer.top_k = 64
  outer.error_decay = 0.95
  # noloco: pull of the partner's parameters.
  outer.pull = 0.5
  return outer


def _zero() -> ml_collections.ConfigDict:
  """Where data-parallel ranks have which part of the state."""
  zero = ml_collections.ConfigDict()
  # Levels of the data-parallel ranks, outermost first, as in "node:2,gpu:4";
  # "": one level named data.
  zero.levels = ""
  # "ddp", "zero1", "zero2", "zero3" (FSDP), "hsdp", "mics", "hpz", "zeropp",
  # "frontier3" or "frontier3_quantised".
  zero.scheme = "ddp"
  # "": as the scheme has it. Up to which level, from the innermost, each is
  # sharded, and "none"; the second copy of the weights, that backwards gather.
  zero.weights = ""
  zero.gradients = ""
  zero.optimizer = ""
  zero.secondary = ""
  # "": as the scheme has it. "none", "int8" or "int4", and elements per scale.
  zero.weight_codec = ""
  zero.gradient_codec = ""
  zero.secondary_codec = ""
  zero.block = 256
  # The optimizer's state waits in the host's memory (pinned) between updates.
  zero.offload = False
  # Weights of the next layer are gathered beside a layer; two are whole then.
  zero.prefetch = False
  return zero


def _data() -> ml_collections.ConfigDict:
  """The text."""
  data = ml_collections.ConfigDict()
  # A .txt or .jsonl file or a folder of them; "": Python's standard library.
  data.path = ""
  data.seq_len = 256
  data.batch_size = 16
  data.validation_percent = 5.0
  # Windows of seq_len that every evaluation reads; 0: all.
  data.validation_windows = 256
  return data


def _optimizer() -> ml_collections.ConfigDict:
  """Of each worker."""
  optimizer = ml_collections.ConfigDict()
  # "adamw", or "sgd" with momentum beta_1.
  optimizer.name = "adamw"
  optimizer.learning_rate = 3e-3
  optimizer.warmup_steps = 20
  optimizer.final_fraction = 0.1
  optimizer.beta_1 = 0.9
  optimizer.beta_2 = 0.95
  optimizer.eps = 1e-8
  optimizer.weight_decay = 0.1
  optimizer.clip_norm = 1.0
  return optimizer


def _train() -> ml_collections.ConfigDict:
  """How long, and how often what."""
  train = ml_collections.ConfigDict()
  train.num_steps = 200
  # Microbatches per step.
  train.accumulation = 1
  train.log_every = 1
  train.eval_every = 100
  train.checkpoint_every = 100
  train.keep_checkpoints = 2
  return train
