"""Webdataset shards: conversion from pictures, counting, verification and serving."""
