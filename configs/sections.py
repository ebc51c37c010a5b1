"""The sections that configs are made of: every key, with its default.

A section holds the keys that have an effect, and no others. Where there is a
choice (of model, data, optimizer or outer loop), each choice has a section of
its own. Other configs put sections together and change a few values.
"""

import ml_collections

ConfigDict = ml_collections.ConfigDict


def transformer() -> ConfigDict:
  """Returns a Llama-style transformer with the sizes of ``tiny``."""
  model = ConfigDict()
  model.name = "transformer"
  # More than the largest token of the data.
  model.vocab_size = 256
  model.width = 128
  model.num_layers = 4
  model.num_heads = 8
  model.num_kv_heads = 8
  model.ffn_width = 352
  # The channels of one head; 0 means width / num_heads.
  model.head_width = 0
  # Biases of queries, keys and values (Qwen2).
  model.qkv_bias = False
  # Norms of each head's queries and keys (Qwen3).
  model.qk_norm = False
  # How many positions a query sees, its own among them (Mistral); 0 for all.
  model.sliding_window = 0
  model.rope_base = 10_000.0
  # How rotary frequencies are changed for longer contexts: (), ("linear",
  # factor), or ("llama3", factor, low, high, original context).
  model.rope_scaling = ()
  model.norm_eps = 1e-5
  model.tied_embeddings = False
  model.init_std = 0.02
  # The dtype of activations; parameters are float32.
  model.dtype = "float32"
  # What the backward recomputes: "none", "full" (a whole layer), or "reduced"
  # (all but what was reduced over ranks, so that nothing is sent again).
  model.remat = "none"
  # Layers per iteration of the scan.
  model.unroll = 1
  # How attention is computed: "xla" (anywhere), "cudnn" (GPU, 16 bits),
  # "splash" (TPU, seq_len a multiple of 128), or "auto" for what fits best.
  model.attention = "auto"
  return model


def convolutional() -> ConfigDict:
  """Returns a residual convolutional network with GroupNorm."""
  model = ConfigDict()
  model.name = "convolutional"
  # The channels of each stage; each stage after the first halves height and
  # width.
  model.widths = (16, 32)
  # The number of residual blocks in each stage, of two 3 x 3 convolutions.
  model.blocks = 2
  # The number of groups of channels that are normalised together.
  model.groups = 4
  # The dtype of activations; parameters are float32.
  model.dtype = "float32"
  return model


def sync() -> ConfigDict:
  """Returns what tensor ranks synchronise in row doors, and how."""
  sync = ConfigDict()
  # The fraction of the stream's channels that the tensor ranks share.
  sync.p = 1.0
  # The same for attention's doors and the MLP's, in place of p: one number, or
  # one per layer; () means p.
  sync.p_attention = ()
  sync.p_mlp = ()
  # Where private channels are multiplied by sqrt(ranks): in the "forward", when
  # weights are drawn ("init"), or nowhere ("none").
  sync.private_scale = "forward"
  # The dtype of each reduction on the wire; "" means that of activations.
  sync.forward_dtype = ""
  sync.backward_dtype = "float32"
  # Whether the shared columns of a row-parallel product are computed first, and
  # the private ones while those are reduced: "on", "off", or "auto" (on GPUs).
  sync.overlap = "auto"
  # How row doors all-reduce: "psum", "scatter_gather" (reduce-scatter and
  # all-gather), "ring" (of permutes), "one_shot" (all-gather and a local sum),
  # "ring_kernel" (TPU), or "schedule:NAME" on the topology below. With
  # "one_shot" and "ring_kernel" one kernel reduces, adds and normalises, where
  # config.kernels has one.
  sync.route = "psum"
  # How the devices of a schedule are linked: "ring", "torus" or "mesh" (both as
  # square as can be), "bigraph", "switch" or "fully_connected"; "" means
  # "torus".
  sync.topology = ""
  # Whether the two routes with a kernel leave the MLP's reduction to the next
  # layer's norm: "on", "off", or "auto" (where nothing is recomputed; LOG.md).
  sync.carry = "auto"
  return sync


def parallel() -> ConfigDict:
  """Returns the axes' logical sizes; --mesh says which devices carry them."""
  parallel = ConfigDict()
  parallel.worker = 1
  parallel.data = 1
  # Stages of a pipeline, each with some of the layers; more than one needs the
  # section of `pipeline`.
  parallel.stage = 1
  parallel.tensor = 8
  # The number in jax.devices() of each place of the mesh, whose axes are
  # worker, data (outermost level first), stage and tensor, the last one
  # fastest, such as a plan advises; () leaves it to jax.
  parallel.device_order = ()
  return parallel


def pipeline() -> ConfigDict:
  """Returns what the stages run; config.train.accumulation is microbatches."""
  pipeline = ConfigDict()
  # What runs when: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped",
  # "zb_h1" or "zb_h2" (`parallel.pipeline.builders`).
  pipeline.timetable = "1f1b"
  # Parts of a stage, for "interleaved_1f1b" and "looped".
  pipeline.chunks = 1
  # Where embedding and head are: "sharded" over the stages, which compute them
  # together, or "replicated", of which the ends' results count.
  pipeline.vocabulary = "sharded"
  # What a forward keeps for the backward: "inputs" of parts, whose forward is
  # then computed again, or "residuals", as many as config.model.remat says.
  # Halved backwards ("zb_h1", "zb_h2") pay with residuals only.
  pipeline.keep = "inputs"
  return pipeline


def outer(algorithm: str) -> ConfigDict:
  """Returns what workers send to each other, and when, by one algorithm.

  Args:
    algorithm: A key of ``OUTER``; another one raises a ValueError.
  """
  if algorithm not in OUTER:
    raise ValueError(
      f"config.outer.algorithm={algorithm!r} is none of {', '.join(OUTER)}"
    )
  section = ConfigDict()
  section.algorithm = algorithm
  section.update(OUTER[algorithm]())
  return section


def _judging() -> ConfigDict:
  """Returns the key that says which workers are left out of an exchange.

  A worker whose difference is not finite is left out, or one whose difference
  has a norm of more than this many times the median of all workers'. 0 leaves
  out only what is not finite.
  """
  return ConfigDict({"outlier_factor": 10.0})


def _exchange() -> ConfigDict:
  """Returns the keys that say how a mean over workers is sent."""
  section = _judging()
  # One weight per worker, such as its number of tokens; () for equal ones.
  section.weights = ()
  # "float32" or "bfloat16" for an all-reduce; or "int8", "fp8", "int4" or
  # "e3m0" for blocks of codes with one float32 scale each. "e3m0", rounded to
  # the nearest number, shrinks Gaussian differences by 3.5 % in blocks of 256.
  section.codec = "float32"
  # Elements per block of codes; 0 means 256.
  section.block = 0
  # How blocks travel: "all_gather" (each difference is rounded once) or
  # "all_to_all" (their means are rounded again).
  section.route = "all_gather"
  # Whether codes are rounded at random, without bias, or to the nearest number.
  section.stochastic_rounding = False
  # Whether what rounding took from a worker is added to its next exchange.
  section.error_feedback = False
  return section


def _round() -> ConfigDict:
  """Returns the key for H, the number of inner steps between exchanges."""
  return ConfigDict({"every": 30})


def _outer_step() -> ConfigDict:
  """Returns an outer optimizer: "nesterov", "sgd" (momentum 0) or "adam"."""
  return ConfigDict(
    {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
  )


def _joined(*parts: ConfigDict) -> ConfigDict:
  """Returns one section with the keys of all parts."""
  section = ConfigDict()
  for part in parts:
    section.update(part)
  return section


def _fedavg() -> ConfigDict:
  section = _joined(_round(), _exchange())
  # How many workers take part in a round, drawn anew for each; 0 for all.
  section.clients = 0
  return section


def _diloco() -> ConfigDict:
  return _joined(_round(), _outer_step(), _exchange())


def _streaming() -> ConfigDict:
  section = _diloco()
  # Layers per fragment (0 makes one fragment of everything), and whether these
  # are evenly spread ("strided") or neighbours ("sequential").
  section.fragment_layers = 1
  section.pattern = "strided"
  # Steps from send to receive (tau): one number, or one per worker.
  section.overlap = (0,)
  # The share of its own parameters that a worker keeps when a mean arrives
  # (alpha).
  section.keep = 0.0
  # Over how many of these steps an exchange is spread.
  section.pieces = 1
  return section


def _dc_s3gd() -> ConfigDict:
  section = _exchange()
  # Strength of the delay compensation (lambda_0); 0 for none.
  section.compensation = 0.2
  return section


def _sparseloco() -> ConfigDict:
  section = _joined(_round(), _judging())
  # One weight per worker, such as its number of tokens; () for equal ones.
  section.weights = ()
  section.learning_rate = 0.7
  # Elements per chunk, and how many of them are sent.
  section.chunk = 4096
  section.top_k = 64
  # The share of what was not sent that a round leaves.
  section.error_decay = 0.95
  return section


def _noloco() -> ConfigDict:
  section = _joined(_round(), _judging())
  # Published (arXiv 2506.10911, section 4, and its authors' code): 0.7, 0.5
  # and 0.7. A momentum of 0.9 with a pull of 0.5 drives 6 workers apart.
  section.learning_rate = 0.7
  section.momentum = 0.5
  # How strongly the outer parameters of a pair attract each other.
  section.pull = 0.7
  return section


# The keys of each algorithm.
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
  """Returns over which ranks each part of the training state is sharded."""
  zero = ConfigDict()
  # The levels of data-parallel ranks, outermost first, as in "node:2,gpu:4"; ""
  # is one level named data.
  zero.levels = ""
  # "ddp", "zero1", "zero2", "zero3" (FSDP), "hsdp", "mics", "hpz", "zeropp",
  # "zeropp_by_level", "frontier3" or "frontier3_quantised".
  zero.scheme = "ddp"
  # The outermost level over which each part is sharded, with all levels inside
  # it; "none" for none, "" for the scheme's. secondary is the second copy of
  # the weights, from which the backward gathers.
  zero.weights = ""
  zero.gradients = ""
  zero.optimizer = ""
  zero.secondary = ""
  # Codecs on the wire: "none", "int8" or "int4"; "" for the scheme's.
  zero.weight_codec = ""
  zero.gradient_codec = ""
  zero.secondary_codec = ""
  # Elements per block of codes; 0 means 256.
  zero.block = 0
  # How many blocks a rank's shard of a parameter must fill for the parameter to
  # be coded; smaller ones are sent as without codecs. 0 codes all.
  zero.coded_blocks = 1
  # Whether coded gradients are reduced in one hop per level ("by_level"), or in
  # one over all levels inside the outermost and one over that ("two"); "" for
  # the scheme's.
  zero.gradient_hops = ""
  # Whether the optimizer's state waits in pinned host memory between steps.
  zero.offload = False
  # Whether a layer's weights are gathered while the layer before it runs; two
  # layers are whole at a time then.
  zero.prefetch = False
  return zero


def text() -> ConfigDict:
  """Returns text, for language models."""
  data = ConfigDict()
  data.name = "text"
  # A .txt or .jsonl file or a folder of them; "" for the source of Python's
  # standard library.
  data.path = ""
  # A tokenizer.json or a folder that has one; "" for tokens that are bytes. The
  # model's vocab_size must be more than its largest token.
  data.tokenizer = ""
  data.seq_len = 256
  data.batch_size = 16
  data.validation_percent = 5.0
  # A file or folder to validate on, in place of a share of path; "" for none.
  data.validation_path = ""
  # How many windows of seq_len every evaluation reads; 0 for all.
  data.validation_windows = 256
  return data


def images() -> ConfigDict:
  """Returns labelled images, for classifiers."""
  data = ConfigDict()
  data.name = "images"
  # An .npz file with arrays "images" and "labels"; "" for scikit-learn's
  # digits.
  data.path = ""
  # The height, width and channels of an image.
  data.shape = (8, 8, 1)
  data.num_classes = 10
  data.batch_size = 64
  data.validation_percent = 20.0
  # A file to validate on, in place of a share of path; "" for none.
  data.validation_path = ""
  return data


def adamw() -> ConfigDict:
  """Returns AdamW as the inner optimizer, with warm-up and cosine decay."""
  optimizer = ConfigDict()
  optimizer.name = "adamw"
  optimizer.learning_rate = 3e-3
  optimizer.warmup_steps = 20
  # The step at which the cosine ends; 0 means train.num_steps.
  optimizer.decay_steps = 0
  # The learning rate from there on, as a fraction of the highest.
  optimizer.final_fraction = 0.1
  optimizer.beta_1 = 0.9
  optimizer.beta_2 = 0.95
  optimizer.eps = 1e-8
  optimizer.weight_decay = 0.1
  # Largest gradient norm of a worker; 0 does not clip.
  optimizer.clip_norm = 1.0
  return optimizer


def sgd() -> ConfigDict:
  """Returns SGD with momentum, with warm-up and cosine decay."""
  optimizer = ConfigDict()
  optimizer.name = "sgd"
  optimizer.learning_rate = 0.3
  optimizer.warmup_steps = 20
  # The step at which the cosine ends; 0 means train.num_steps.
  optimizer.decay_steps = 0
  # The learning rate from there on, as a fraction of the highest.
  optimizer.final_fraction = 0.1
  optimizer.momentum = 0.9
  optimizer.weight_decay = 0.0
  # Largest gradient norm of a worker; 0 does not clip.
  optimizer.clip_norm = 1.0
  return optimizer


def train() -> ConfigDict:
  """Returns how long a run is and how often it does what, in steps."""
  train = ConfigDict()
  train.num_steps = 200
  # Microbatches per step.
  train.accumulation = 1
  train.log_every = 1
  train.eval_every = 100
  train.checkpoint_every = 100
  train.keep_checkpoints = 2
  # The folder of a run whose newest parameters this run starts with, of the
  # same model and ranks; p may differ. "" draws them.
  train.init_from = ""
  return train


def inference() -> ConfigDict:
  """Returns how a language model continues text (`launch.generate`)."""
  inference = ConfigDict()
  # Sequences at a time in each replica; config.parallel.data says how many
  # replicas there are.
  inference.batch = 16
  # The positions of a sequence, those of its prompt among them.
  inference.context = 1024
  # The positions of a page of the cache.
  inference.page_size = 64
  # The pages of a replica's cache; 0 for as many as the whole batch can fill.
  inference.pages = 0
  # How many tokens of a prompt one step reads.
  inference.chunk = 256
  # The dtype of weights and activations; "" for config.model.dtype.
  inference.dtype = ""
  # How matrices are kept in memory: "float", or "int8" with a scale per block.
  inference.weights = "float"
  # How keys and values are kept: "float", or "int8" with a scale per token and
  # head.
  inference.cache = "float"
  return inference


def elastic() -> ConfigDict:
  """Returns how a worker takes part in a swarm (`launch.train --elastic`)."""
  elastic = ConfigDict()
  # The order in which floats are added: "direct" (that of the workers) or
  # "ring". Codes are always added in the order of the workers.
  elastic.order = "direct"
  # Seconds without a coordinator after which a worker saves and ends.
  elastic.alone_s = 300.0
  # Connections from each worker to each other; several for long fat links.
  elastic.lanes = 1
  # Whether what is exchanged has checksums, beside those of TCP.
  elastic.checksums = False
  return elastic


def choices() -> ConfigDict:
  """Returns all sections that a sweep may put in place of a config's."""
  return ConfigDict({
    "outer": {name: outer(name) for name in OUTER},
    "optimizer": {"adamw": adamw(), "sgd": sgd()},
  })
