"""Training step of Levanter's Llama, as its `Trainer` compiles it."""

PACKAGES = ("marin-levanter==0.2.227.dev40316220070",)
LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 3, 32, 4, 64, 96
DATA, MODEL = 4, 2
BATCH, LENGTH = 8, 128


def llama():
  """`Trainer.train_step` with AdamW, whose parameters are cut over both axes.

  Tokens are ``[BATCH, LENGTH]`` int32. Heads and neurons are cut over "model";
  the width of the parameters and the examples over "data".
  """
  import haliax as hax
  import jax
  from levanter import tracker
  from levanter.models.llama import LlamaConfig
  from levanter.models.lm_model import LmExample
  from levanter.optim.config import AdamConfig
  from levanter.trainer import Trainer, TrainerConfig
  from levanter.utils.mesh import MeshConfig

  tracker.set_global_tracker(tracker.NoopTracker())
  config = TrainerConfig(
    id="step", mesh=MeshConfig(
      axes={"data": DATA, "model": MODEL}, shared_mapping={"kv_head": "model"}
    ), train_batch_size=BATCH, num_train_steps=10, load_checkpoint=False,
  )
  model = LlamaConfig(
    max_seq_len=LENGTH, hidden_dim=WIDTH, intermediate_dim=HIDDEN,
    num_layers=LAYERS, num_heads=HEADS, num_kv_heads=HEADS,
    gradient_checkpointing=False,
  )

  # As in levanter.main.train_lm.
  def loss(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key)

  trainer = Trainer(
    config, AdamConfig().build(config.num_train_steps), loss,
    add_default_hooks=False,
  )
  trainer.__enter__()  # its mesh is that of the caller, which lowers the step
  key = jax.random.PRNGKey(0)
  vocabulary = hax.Axis("vocab", VOCABULARY)
  state = trainer.initial_state(
    key, model_init=lambda: model.build(vocabulary, key=key)
  )
  shape = trainer.TrainBatch, model.max_Pos
  batch = hax.shard(
    LmExample(hax.zeros(shape, dtype="int32"), hax.ones(shape)),
    trainer.compute_axis_mapping,
  )
  return trainer._jit_train_step_fn_no_hook, (state, (batch,), {})
