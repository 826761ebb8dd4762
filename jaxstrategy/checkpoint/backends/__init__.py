"""How arrays get to a disk and back: an abstract class, and Orbax behind it."""
