"""Do the parity tests notice a wrong formula? Mutants of dynamo_core/algorithms, each run against them."""
