"""Part formats, one file each. A store writes one closed, durable file and says what it wrote."""
