"""How a run starts: alone or as one of several processes, with compiled programs kept between runs."""
