out_dir = "out/tiny"
