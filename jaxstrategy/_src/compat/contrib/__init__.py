"""Names of `tf.contrib.distribute`, of TensorFlow 1.7 to 1.12."""
