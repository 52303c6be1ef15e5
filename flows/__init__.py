"""When things run: the staged recipe as a Prefect flow, and the command line."""
