"""Where ranks run: on the workers of a Dask cluster."""
