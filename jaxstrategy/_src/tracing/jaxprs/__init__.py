"""Ways through jaxprs, and jaxprs in which other equations stand for some."""
