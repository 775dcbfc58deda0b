"""python -m olmo_core_jax.cli: the same as olmo-jax."""

from olmo_core_jax.cli import main

main()
