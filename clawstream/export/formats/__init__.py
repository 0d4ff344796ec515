"""One file per export format; `registry` lists them."""
