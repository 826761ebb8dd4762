"""TPUs as `tf.tpu` has them: where their cores are, and which replica has which."""
