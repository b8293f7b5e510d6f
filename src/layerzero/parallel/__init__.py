"""Ways of splitting one model over ranks that go together with sharded data parallelism."""
