"""The names of `tf.compat.v1.distribute`: a program of TensorFlow 1.x imports it so."""
