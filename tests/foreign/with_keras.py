"""Training steps of Keras models, as `fit` compiles them."""

import os

PACKAGES = ("keras", "jax")
BATCH, INPUTS, HIDDEN, CLASSES = 64, 48, 128, 16


def data_parallel():
  """`Model.train_step` under `keras.distribution.DataParallel`.

  Inputs are ``[BATCH, INPUTS]`` float32, labels ``[BATCH]`` int32.
  """
  os.environ["KERAS_BACKEND"] = "jax"
  import keras

  return _step(keras.distribution.DataParallel())


def model_parallel():
  """`Model.train_step` under `keras.distribution.ModelParallel`.

  Inputs are ``[BATCH, INPUTS]`` float32, labels ``[BATCH]`` int32; the hidden
  channels are cut over the axis "model".
  """
  os.environ["KERAS_BACKEND"] = "jax"
  from keras import distribution

  mesh = distribution.DeviceMesh((2, 4), ("batch", "model"))
  layouts = distribution.LayoutMap(mesh)
  layouts[".*/up/kernel"] = (None, "model")
  layouts[".*/up/bias"] = ("model",)
  layouts[".*/down/kernel"] = ("model", None)
  return _step(distribution.ModelParallel(
    layout_map=layouts, batch_dim_name="batch"
  ))


def _step(distribution):
  import jax
  import keras

  keras.distribution.set_distribution(distribution)
  model = keras.Sequential([
    keras.layers.Input((INPUTS,)),
    keras.layers.Dense(HIDDEN, activation="relu", name="up"),
    keras.layers.Dense(CLASSES, name="down"),
  ])
  model.compile(
    optimizer=keras.optimizers.SGD(0.1),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  model.optimizer.build(model.trainable_variables)
  x = jax.numpy.ones((BATCH, INPUTS))
  y = jax.numpy.ones((BATCH,), "int32")
  model.train_on_batch(x, y)  # builds the state, and the function
  state = model._get_jax_state(
    trainable_variables=True, non_trainable_variables=True,
    optimizer_variables=True, metrics_variables=True,
  )
  data = tuple(
    jax.device_put(v, distribution.get_data_layout(v.shape).backend_layout)
    for v in (x, y)
  )
  shardings = model._get_state_sharding_spec()
  step = jax.jit(
    model.train_step, donate_argnums=0, out_shardings=(None, shardings)
  )
  return step, (state, data)
