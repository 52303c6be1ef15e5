"""The mathematics against reference numbers, slow twins and properties."""
