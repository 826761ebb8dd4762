"""Pure collectives: arrays of one replica in, arrays of one replica out."""
