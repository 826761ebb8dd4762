"""The strategies: one final class a file over a common base; mostly choices."""
