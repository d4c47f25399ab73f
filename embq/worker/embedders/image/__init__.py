"""Images: decoding, preprocessing, upload and vision towers."""
