"""Small charts as SVG inside HTML: no scripts, readable on white and dark pages."""
