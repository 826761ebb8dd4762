"""Text for people: parts of messages, units, tables, lines of the user's code."""
